//! NAT log with an independent collector (nfcapd), over UDP and TCP, and during an outage of the collector.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::Process;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_A, wait_for};

/// nfcapd on the gateway's host.
struct Collector {
    process: Process,
    folder: PathBuf,
}

impl Collector {
    fn start(testbed: &Testbed) -> Self {
        let folder = testbed.folder.path().join("flows");
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.display().to_string();
        let command = ["nfcapd", "-w", &path, "-p", "4739", "-b", "127.0.0.1", "-t", "3600"];
        let process = testbed.gateway.spawn(&command, &testbed.folder.path().join("nfcapd.log")).unwrap();
        let bound = || testbed.gateway.output(&["ss", "-lun"]).is_ok_and(|ports| ports.contains("127.0.0.1:4739"));
        assert!(wait_for(Duration::from_secs(5), bound), "nfcapd does not listen");
        Self { process, folder }
    }

    /// Stops it; returns the received records.
    fn end(mut self) -> Vec<Value> {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(5)).expect("nfcapd ends");
        let files = std::fs::read_dir(&self.folder).unwrap().map(|entry| entry.unwrap().path());
        let mut all = Vec::new();
        for file in files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with("nfcapd.2")) {
            let text = vipgate_lab::output(&["nfdump", "-r", &file.display().to_string(), "-o", "json"]).unwrap();
            let Value::Array(records) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
            all.extend(records);
        }
        all
    }
}

/// Records of an event (IANA natEvent number) with this source address before translation.
fn events<'a>(records: &'a [Value], event: &str, source: &str) -> Vec<&'a Value> {
    let matches = |record: &&Value| {
        record["nat_event_id"] == event && (record["src4_addr"] == source || record["src6_addr"] == source)
    };
    records.iter().filter(matches).collect()
}

fn sent(testbed: &Testbed) -> f64 {
    testbed.metric("vipgate_nat_log_records_total", "result=\"sent\"")
}

#[test]
fn a_collector_receives_all_mappings_also_after_an_outage() {
    let mut testbed = Testbed::new("natlog");
    testbed.start("nat_log: {collector: \"127.0.0.1:4739\", sessions: true, domain: 7}");
    let log = || testbed.query(&["status"])["nat_log"].clone();
    assert!(wait_for(Duration::from_secs(5), || log()["error"] != ""), "no collector: {}", log());
    assert!(testbed.metric("vipgate_nat_log_up", "") < 0.5);
    // Traffic is not affected.
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let collector = Collector::start(&testbed);
    assert!(wait_for(Duration::from_secs(20), || log()["error"] == "" && sent(&testbed) > 5.5), "{}", log());
    testbed.check_source_addresses(&testbed.pods[1], SERVER, VIP_A);
    // A pod is added and removed.
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    let has_endpoint = |address: &str| {
        let endpoints = testbed.query(&["endpoints"]);
        endpoints["endpoints"].as_array().unwrap().iter().any(|endpoint| endpoint["address"] == address)
    };
    assert!(wait_for(Duration::from_secs(10), || has_endpoint("10.1.0.31")));
    std::fs::remove_file(testbed.folder.path().join("policy/more.yaml")).unwrap();
    assert!(wait_for(Duration::from_secs(10), || !has_endpoint("10.1.0.31")));
    let flushed = testbed.query(&["sessions", "flush", "--endpoint", "10.1.0.12"])["ended"].as_u64().unwrap();
    assert!(flushed >= 3);
    let before = sent(&testbed);
    assert!(wait_for(Duration::from_secs(5), || sent(&testbed) >= before), "all is sent");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(log()["lost"], 0, "{}", log());
    let records = collector.end();
    // Port blocks: allocated and released.
    let block = events(&records, "16", "10.1.0.11");
    assert_eq!(block[0]["src4_xlt_ip"], VIP_A[0], "{block:?}");
    assert_eq!(events(&records, "16", "10.1.0.31").len(), 1);
    assert_eq!(events(&records, "17", "10.1.0.31").len(), 1);
    assert!(!events(&records, "16", "fd00:1::11").is_empty(), "and IPv6");
    // Sessions, also those that began before the collector was started.
    let created = events(&records, "4", "10.1.0.11");
    let tcp = created.iter().find(|record| record["proto"] == 6).unwrap();
    assert_eq!((&tcp["dst4_addr"], &tcp["src4_xlt_ip"]), (&SERVER[0].into(), &VIP_A[0].into()), "{tcp}");
    assert!(tcp["src_xlt_port"].as_str().unwrap().parse::<u16>().unwrap() >= 1024, "{tcp}");
    assert!(events(&records, "5", "10.1.0.12").len() >= 3, "flushed sessions are logged as deleted");
    testbed.check_frames();
}

#[test]
fn tcp_export_sends_templates_first_and_names_tenants() {
    let mut testbed = Testbed::new("natlogtcp");
    let received = testbed.router.run(|| {
        let listener = TcpListener::bind("203.0.113.254:4739")?;
        let (mut stream, _) = listener.accept()?;
        let mut all = Vec::new();
        let mut chunk = [0; 4096];
        // Templates, and one message with six endpoints and their VIPs.
        while all.len() < 212 + 6 * 40 {
            match stream.read(&mut chunk)? {
                0 => break,
                count => all.extend_from_slice(&chunk[..count]),
            }
        }
        Ok::<_, std::io::Error>(all)
    });
    std::thread::sleep(Duration::from_millis(300));
    testbed.start("nat_log: {collector: \"203.0.113.254:4739\", transport: tcp}");
    let all = received.join().unwrap().unwrap();
    // Version 10, then the template set (RFC 7011 sections 3.1 and 3.3.2).
    assert_eq!((&all[..2], &all[16..18]), (&[0, 10][..], &[0, 2][..]));
    let has = |text: &str| all.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has("tenant-a/api tenant-a/api-0") && has("tenant-b/web tenant-b/web-0"), "tenants and pods are named");
    let (code, stdout, _) =
        testbed.command(&["status", "--socket", &testbed.folder.path().join("gateway.sock").display().to_string()]);
    assert!(code == 0 && stdout.contains("nat log   blocks to tcp 203.0.113.254:4739"), "{stdout}");
}
