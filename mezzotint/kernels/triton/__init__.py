"""CUDA kernels in Triton and their launches: each format has one file, loaded when the first CUDA tensor arrives."""
