//! ARP probe: continuous requests for one address on the gateways' outer segment, and the gateways that reply.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::Process;

use super::{Cluster, script_path};

/// Running ARP requests, one a millisecond.
#[derive(Debug)]
pub struct ArpProbe {
    process: Process,
    record: PathBuf,
}

#[derive(Clone, Debug)]
pub struct ArpReply {
    /// The number of the request.
    pub request: u64,
    /// The sender MAC address.
    pub mac: String,
    /// Milliseconds since the first request.
    pub ms: u64,
}

impl Cluster {
    /// Starts ARP requests for an address.
    pub fn start_arp_probe(&self, address: &str) -> ArpProbe {
        let record = self.folder_path().join("who-has.json");
        let (script, path) = (script_path("cluster/who_has.py"), record.display().to_string());
        let command = ["python3", &script, "public", address, &path];
        let mut process = self.outside.spawn(&command, &record.with_extension("log")).unwrap();
        process.wait_for_log("sending", Duration::from_secs(5)).unwrap_or_else(|error| panic!("{error}"));
        ArpProbe { process, record }
    }
}

impl ArpProbe {
    /// Stops the probe. The number of requests, and the replies in the order of arrival.
    pub fn end(mut self) -> (u64, Vec<ArpReply>) {
        self.process.stop("TERM", Duration::from_secs(5)).unwrap().expect("the probe exits");
        let result: Value = serde_json::from_str(&fs::read_to_string(&self.record).unwrap()).unwrap();
        let reply = |row: &Value| ArpReply {
            request: row[0].as_u64().unwrap(),
            mac: row[1].as_str().unwrap().to_owned(),
            ms: row[2].as_u64().unwrap(),
        };
        (result["requests"].as_u64().unwrap(), result["replies"].as_array().unwrap().iter().map(reply).collect())
    }
}

/// The MAC addresses that replied, in the order of the requests, each change once. Fails if two replied to one
/// request.
pub fn responder_macs(replies: &[ArpReply]) -> Vec<String> {
    let mut of_request: BTreeMap<u64, &ArpReply> = BTreeMap::new();
    for reply in replies {
        if let Some(other) = of_request.insert(reply.request, reply) {
            assert_eq!(other.mac, reply.mac, "two gateways replied to one request: {other:?}, {reply:?}");
        }
    }
    let mut macs: Vec<String> = of_request.values().map(|reply| reply.mac.clone()).collect();
    macs.dedup();
    macs
}
