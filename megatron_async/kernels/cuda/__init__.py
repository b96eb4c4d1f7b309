"""CUDA C++ kernels of the decode path, compiled at run time and kept on disk."""
