"""What a configuration costs a video and what it saves: prompts and seeds against dense attention."""

from .. import require_diffusers

require_diffusers(__name__)
