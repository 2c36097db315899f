"""Kernels in C++, for processors.

``src`` is built once for each level of instructions, into libraries that lie beside this file; `library` loads the best
one that the machine can run. They are plain C functions over memory that Python owns.
"""
