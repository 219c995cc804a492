"""CUDA kernels in Triton and their launches, one file per format; loaded when the first CUDA tensor arrives."""
