"""What takes how long on this machine: single layers, and whole networks really cut, in the runtime asked for."""
