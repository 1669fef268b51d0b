"""Block-sparse attention of NVIDIA's cuDNN frontend (``cudnn.BSA``) behind this package's lists of blocks."""
