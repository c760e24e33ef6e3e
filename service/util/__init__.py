"""What several packages of the service use, and what knows none of them."""
