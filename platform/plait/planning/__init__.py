"""Plans of whole searches before anything trains: what runs where, and what it will take."""
