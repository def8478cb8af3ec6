//! etcd as a source.
