"""This machine: devices, memory, load, interfaces and packages; descriptions of its links."""
