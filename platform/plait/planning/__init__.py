"""Plans a whole search before anything trains: what runs where, and how much time and memory it needs."""
