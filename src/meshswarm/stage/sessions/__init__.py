"""What heads keep open on a span, and the messages of a step."""
