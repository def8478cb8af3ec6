//! What a client counts, and when it ends.

use super::*;

/// A client with the identity 18, and what becomes ready with its first reply.
fn client(config: ClientConfig<'static>) -> (LineClient, oneshot::Receiver<()>) {
    let server = SocketAddr::from(([127, 0, 0, 1], 7700));
    let shared = Shared { first: 17, server, config, open: AtomicUsize::new(0) };
    let (no_reply_yet, has_reply) = oneshot::channel();
    (LineClient::new(Arc::new(shared), 1, no_reply_yet), has_reply)
}

fn tcp(lines: u32) -> ClientConfig<'static> {
    ClientConfig { lines, ..ClientConfig::default() }
}

fn udp(lines: u32) -> ClientConfig<'static> {
    ClientConfig { udp: true, ..tcp(lines) }
}

#[test]
fn replies_to_others_and_out_of_order_are_counted() {
    for (config, misdelivered) in [(tcp(0), 2), (udp(0), 1)] {
        let (mut client, mut has_reply) = client(config);
        let now = Instant::now();
        client.unanswered.extend([now, now, now]);
        client.lost.extend([(0, 1.0), (1, 2.0), (2, 3.0)]);
        assert_eq!(has_reply.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        client.count_reply(b"00000018 000000", now + Duration::from_secs(2));
        assert_eq!(has_reply.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        client.count_reply(b"00000018 000002", now + Duration::from_secs(3));
        client.count_reply(b"00000019 000002", now + Duration::from_secs(4));
        assert_eq!((client.result.lines[1], client.result.misdelivered), (3, misdelivered));
        assert!((client.result.longest_wait[0] - 2.0).abs() < 0.1, "{:?}", client.result);
        let lost: &[u64] = if client.shared.config.udp { &[1] } else { &[0, 1, 2] };
        assert!(client.lost.keys().eq(lost), "{:?}", client.lost);
        assert_eq!(client.shared.open.load(Relaxed), 1);
    }
}

#[test]
fn a_client_without_a_number_of_lines_ends_when_it_is_stopped() {
    let second = Duration::from_secs(1);
    let (mut client, _) = client(tcp(0));
    let now = Instant::now();
    assert_eq!(client.end(now + 100 * second), None);
    client.stopped = Some(now);
    assert_eq!((client.end(now), client.end(now + 10 * second)), (None, Some("silent")), "not connected");
    client.is_connected = true;
    client.unanswered.push_back(now);
    assert_eq!((client.end(now + 9 * second), client.end(now + 10 * second)), (None, Some("silent")));
    client.unanswered.clear();
    assert_eq!(client.end(now), Some("alive"));
    let (mut client, _) = self::client(udp(0));
    client.stopped = Some(now);
    assert_eq!((client.end(now), client.end(now + second)), (None, Some("alive")));
}

#[test]
fn a_client_with_a_number_of_lines_ends_with_them_or_without_a_reply() {
    for config in [tcp(2), udp(2)] {
        let is_udp = config.udp;
        let (mut client, _) = client(config);
        let now = client.last;
        let ends = |client: &LineClient| [9, 10].map(|seconds| client.end(now + Duration::from_secs(seconds)));
        assert_eq!(ends(&client), [None, Some("silent")]);
        client.stopped = Some(now);
        assert_eq!(client.end(now), Some(if is_udp { "alive" } else { "silent" }));
        client.result.lines = [2, 2];
        assert_eq!(ends(&client), [Some("done"); 2]);
    }
}

#[test]
fn intervals_are_distributed_by_percentage() {
    let intervals = [(5, 0.1, 0.2), (95, 4.0, 6.0)];
    let chosen = [0.0, 4.9, 5.0, 100.0].map(|draw| choose_interval(&intervals, draw));
    assert_eq!(chosen, [(0.1, 0.2), (0.1, 0.2), (4.0, 6.0), (4.0, 6.0)]);
    assert_eq!(choose_interval(&[], 50.0), (1.0, 1.0));
    let mut random = Random(1);
    let numbers: Vec<f64> = (0..1000).map(|_| between(&mut random, (4.0, 6.0))).collect();
    assert!(numbers.iter().all(|number| (4.0..=6.0).contains(number)));
    assert!(numbers.iter().any(|number| *number < 4.1) && numbers.iter().any(|number| *number > 5.9));
}
