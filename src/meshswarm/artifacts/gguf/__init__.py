"""The GGUF format, read strictly: nothing of a file reaches C++ before it passed here."""
