"""What a model does while it trains: gates, attention sinks, massive activations, experts, speed."""
