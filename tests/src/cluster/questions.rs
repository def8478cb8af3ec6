//! Who answers when everybody on the gateways' outer segment is asked, all the time, who has an address.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::Process;

use super::{Cluster, script};
use crate::wait_for;

/// ARP requests, one a millisecond.
#[derive(Debug)]
pub struct Questions {
    process: Process,
    record: PathBuf,
}

/// An answer to one of them.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The number of the request.
    pub request: u64,
    /// The link address that it names.
    pub mac: String,
    /// Milliseconds since the first request.
    pub ms: u64,
}

impl Cluster {
    /// Begins to ask who has an address.
    pub fn ask_who_has(&self, address: &str) -> Questions {
        let record = self.path().join("who-has.json");
        let log = record.with_extension("log");
        let (script, path) = (script("cluster/who_has.py"), record.display().to_string());
        let process = self.outside.spawn(&["python3", &script, "public", address, &path], &log).unwrap();
        let asks = || fs::read_to_string(&log).is_ok_and(|log| log.contains("asks"));
        assert!(wait_for(Duration::from_secs(5), asks), "{}", fs::read_to_string(&log).unwrap_or_default());
        Questions { process, record }
    }
}

impl Questions {
    /// Ends them. How many there were, and the answers as they came.
    pub fn end(mut self) -> (u64, Vec<Answer>) {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(5)).expect("it ends");
        let told: Value = serde_json::from_str(&fs::read_to_string(&self.record).unwrap()).unwrap();
        let answer = |row: &Value| Answer {
            request: row[0].as_u64().unwrap(),
            mac: row[1].as_str().unwrap().to_owned(),
            ms: row[2].as_u64().unwrap(),
        };
        (told["asked"].as_u64().unwrap(), told["answers"].as_array().unwrap().iter().map(answer).collect())
    }
}

/// Who answered, in the order of the requests: one link address for each time that it is another one. Fails if two answered one request.
pub fn answering(answers: &[Answer]) -> Vec<String> {
    let mut of_request: BTreeMap<u64, &Answer> = BTreeMap::new();
    for answer in answers {
        if let Some(other) = of_request.insert(answer.request, answer) {
            assert_eq!(other.mac, answer.mac, "two gateways answer one request: {other:?}, {answer:?}");
        }
    }
    let mut macs: Vec<String> = of_request.values().map(|answer| answer.mac.clone()).collect();
    macs.dedup();
    macs
}
