"""The population: the clients that nodes host, and the node of each."""
