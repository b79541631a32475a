"""What goes over the wire to jaxlib's client: messages, dtypes, shardings, status codes, versions."""
