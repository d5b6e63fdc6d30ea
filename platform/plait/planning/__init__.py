"""Plans of whole searches before anything trains: what runs where, and how much time and memory it needs."""
