"""What a configuration costs a video and what it saves: prompts and seeds against dense attention. Of the other rooms none imports
this one."""

try:
    import diffusers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name == "diffusers":
        raise ImportError(f"{__name__} needs diffusers 0.42, which is not installed: pip install 'diffusers==0.42.*' transformers "
                          "accelerate") from error
    raise
