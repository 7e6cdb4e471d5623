"""One span computed by llama.cpp, on a thread of its own."""
