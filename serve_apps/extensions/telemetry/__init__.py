"""What requests, model calls, tools and episodes of a process do, as spans of OpenTelemetry."""
