"""The server on a Ray cluster: the number of its replicas, the routing of requests, and running them."""
