//! A device over pcap files.
