"""SQL of the producers: numbered migrations (applied by producers.migrate), read as package resources."""
