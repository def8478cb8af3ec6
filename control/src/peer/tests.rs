//! Full meshes of gateways in one process, over 127.0.0.1 with real TLS.

mod links;
mod replication;
mod testbed;
mod untrusted;

pub(crate) use self::testbed::session_record;
