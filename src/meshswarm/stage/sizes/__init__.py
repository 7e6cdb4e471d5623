"""What a span takes in memory, before it is loaded."""
