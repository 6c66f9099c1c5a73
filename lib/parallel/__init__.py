"""Process groups, collectives, parameter storage and random streams."""
