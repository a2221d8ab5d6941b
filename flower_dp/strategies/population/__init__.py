"""Who is there: the clients that nodes host, and which node hosts each."""
