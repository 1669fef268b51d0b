"""Between projection and attention: norm, RoPE, tile order, means, scores, ranking."""
