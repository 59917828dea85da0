"""The program: command line, demonstration, benchmarks and fault campaigns."""
