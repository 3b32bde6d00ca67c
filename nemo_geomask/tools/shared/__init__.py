"""Tables, colours, JSON and confidence intervals that several tools share."""
