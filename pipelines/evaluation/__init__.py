"""What a configuration costs a video and what it saves: prompts and seeds against dense attention. Nothing else imports this room."""
