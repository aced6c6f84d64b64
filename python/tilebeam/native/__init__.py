"""The shared libraries: where they lie, their C interfaces, llama.cpp through llama-cpp-python."""
