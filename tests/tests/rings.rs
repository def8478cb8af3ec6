//! While a worker is off its core, its rings take what comes: how much that is, and that what they lose is counted as dropped.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate_tests::{SERVER, World, wait_for};

const BURST: u32 = 3000;

/// Packets that the steering program has captured, that workers have received, and that rings have lost for want of a frame.
fn counted(world: &World) -> [f64; 3] {
    let steered = world.metric("vipgate_steered_packets_total", r#"outcome="captured""#);
    let lost = world.metric("vipgate_drops_total", r#"reason="rx_no_buffer""#);
    [steered, world.metric("vipgate_received_total", ""), lost]
}

/// Sends packets of one flow while the gateway is stopped; what of these was captured, received, and lost.
fn burst(world: &World) -> [f64; 3] {
    // One at a time first, so that a session and all neighbours are there.
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
        world.pods[0].output(&["python3", "-c", &script]).unwrap();
    };
    send(1);
    let is_quiet = || {
        let [captured, received, lost] = counted(world);
        std::thread::sleep(Duration::from_millis(100));
        let now = counted(world);
        let same = |a: f64, b: f64| (a - b).abs() < 0.5;
        same(now[0], captured) && same(now[1], received) && same(now[2], lost) && same(captured, received + lost)
    };
    assert!(wait_for(Duration::from_secs(10), is_quiet), "{:?}", counted(world));
    let before = counted(world);
    let gateway = world.process();
    gateway.signal("STOP").unwrap();
    send(BURST);
    gateway.signal("CONT").unwrap();
    // Each captured packet is either received or lost.
    assert!(wait_for(Duration::from_secs(10), is_quiet), "{:?}", counted(world));
    let after = counted(world);
    std::array::from_fn(|i| after[i] - before[i])
}

#[test]
fn what_rings_lose_is_a_drop_and_longer_ones_lose_nothing() {
    let mut world = World::new("rings");
    world.start("xdp: {fill_ring: 1024}");
    let [captured, received, lost] = burst(&world);
    assert!(captured >= f64::from(BURST) * 0.9, "{captured} came, {received} of them were received");
    // Some of what else comes, such as questions for neighbours, lies on other queues.
    assert!((1024.0..1124.0).contains(&received), "a queue holds as many as it has frames for, not {received}");
    assert!(lost > 1500.0, "{captured} came, {received} were received, {lost} are said to be lost");
    let shown = &world.ask(&["drops"])["rx_no_buffer"];
    assert_eq!(shown.as_f64(), Some(counted(&world)[2]));
    // The kernel counts a packet without a frame twice.
    let lost = shown.as_u64().unwrap();
    world.ledger.expect_exactly([("rx_no_buffer", lost), ("ring_dropped", lost)]);

    world.end("TERM");
    world.start("");
    let [captured, received, lost] = burst(&world);
    assert!(captured >= f64::from(BURST) * 0.9, "{captured} came, {received} of them were received");
    assert_eq!((received, lost), (captured, 0.0), "a fill ring of the default size outlasts this");
}
