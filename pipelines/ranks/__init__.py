"""One forward shared by several ranks: how diffusers splits a family's model, and what its attentions send to one another."""
