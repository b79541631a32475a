"""The demonstration job: its data, its MaxText command line, and the native baseline it is compared with."""
