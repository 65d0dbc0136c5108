"""Who samples: adapters of the Engine port."""
