"""What is said of models by those who publish and hold them, and whose word counts."""
