//! Fill ring overflow: while a worker is off its core its rings buffer packets, and what they lose is counted as
//! dropped.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_tests::{SERVER, Testbed, wait_for};

const BURST: u32 = 3000;

/// Packets captured by the steering program, received by workers, and lost by rings without a free frame.
fn counters(testbed: &Testbed) -> [f64; 3] {
    let steered = testbed.metric("vipgate_steered_packets_total", r#"outcome="captured""#);
    let lost = testbed.metric("vipgate_drops_total", r#"reason="rx_no_buffer""#);
    [steered, testbed.metric("vipgate_received_total", ""), lost]
}

/// Sends packets of one flow while the gateway is suspended; how many of these were captured, received and lost.
fn burst(testbed: &Testbed) -> [f64; 3] {
    // First a single packet, which opens the session and resolves all neighbors.
    let send = |packets: u32| {
        let script = format!(
            "import socket, time\n\
             s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
             s.bind(('', 4000))\n\
             for n in range({packets}):\n\
             \x20   s.sendto(b'x' * 20, ('{}', 9))\n\
             \x20   if n % 32 == 31: time.sleep(0.001)\n",
            SERVER[0]
        );
        testbed.pods[0].output(&["python3", "-c", &script]).unwrap();
    };
    send(1);
    let is_quiet = || {
        let [captured, received, lost] = counters(testbed);
        std::thread::sleep(Duration::from_millis(100));
        let now = counters(testbed);
        let same = |a: f64, b: f64| (a - b).abs() < 0.5;
        same(now[0], captured) && same(now[1], received) && same(now[2], lost) && same(captured, received + lost)
    };
    assert!(wait_for(Duration::from_secs(10), is_quiet), "{:?}", counters(testbed));
    let before = counters(testbed);
    let gateway = testbed.process();
    gateway.signal("STOP").unwrap();
    send(BURST);
    gateway.signal("CONT").unwrap();
    // Each captured packet is either received or lost.
    assert!(wait_for(Duration::from_secs(10), is_quiet), "{:?}", counters(testbed));
    let after = counters(testbed);
    std::array::from_fn(|i| after[i] - before[i])
}

#[test]
fn fill_ring_exhaustion_is_counted_as_drops() {
    let mut testbed = Testbed::new("rings");
    testbed.start("xdp: {fill_ring: 1024}");
    let [captured, received, lost] = burst(&testbed);
    assert!(captured >= f64::from(BURST) * 0.9, "{captured} captured, {received} received");
    // Other packets, such as neighbor solicitations, may arrive on other queues.
    assert!((1024.0..1124.0).contains(&received), "a queue holds as many packets as it has frames, not {received}");
    assert!(lost > 1500.0, "{captured} captured, {received} received, {lost} counted as lost");
    let drops = &testbed.query(&["drops"])["rx_no_buffer"];
    assert_eq!(drops.as_f64(), Some(counters(&testbed)[2]));
    // The kernel counts a packet without a frame twice.
    let lost = drops.as_u64().unwrap();
    testbed.accounting.expect_exactly([("rx_no_buffer", lost), ("ring_dropped", lost)]);

    testbed.stop("TERM");
    testbed.start("");
    let [captured, received, lost] = burst(&testbed);
    assert!(captured >= f64::from(BURST) * 0.9, "{captured} captured, {received} received");
    assert_eq!((received, lost), (captured, 0.0), "a fill ring of the default size holds the burst");
}
