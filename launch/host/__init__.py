"""What one machine is: devices, cores, interfaces, packages, and its links."""
