//! Admin socket and metrics before the initial policy, and on the same connections when the engine runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use vipgate::admin::capture::{CaptureReply, CaptureRequest};
use vipgate::admin::drops::DropsReply;
use vipgate::admin::{Client, Request};
use vipgate::state::group::GroupStatus;

use crate::gateway::{Gateway, Worker, policy, sessions};

fn waiting() -> Gateway {
    let gateway = Gateway::start_waiting(&policy(), GroupStatus::default());
    gateway.state.ready.store(false, Ordering::Relaxed);
    gateway
}

/// Requests a page over a connection that stays open; returns the body.
fn get(connection: &mut BufReader<TcpStream>, path: &str) -> String {
    write!(connection.get_mut(), "GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        connection.read_line(&mut line).unwrap();
        if line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).unwrap();
    String::from_utf8(body).unwrap()
}

/// Packets dropped by all workers.
async fn dropped(client: &mut Client) -> u64 {
    let reply: DropsReply = client.ask(&Request::Drops).await.unwrap();
    reply.drops.iter().map(|drop| drop.packets).sum()
}

#[test]
fn without_an_engine_there_are_no_sessions_and_nothing_to_trace() {
    let gateway = waiting();
    let status = gateway.json(&["status"]);
    assert_eq!((&status["ready"], &status["workers"]), (&false.into(), &serde_json::json!([])));
    assert_eq!(gateway.json(&["sessions"])["sessions"], serde_json::json!([]));
    assert_eq!(gateway.json(&["drops"])["no_service"], 0);
    let (code, _, stderr) = gateway.vipgate(&["trace", "--from", "10.1.0.11", "--to", "198.51.100.10"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("the gateway is still starting: it drops all packets"), "{stderr}");
}

#[test]
fn connections_stay_open_while_the_engine_starts() {
    let gateway = waiting();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut client = runtime.block_on(Client::connect(&gateway.socket())).unwrap();
    let mut scrapes = BufReader::new(TcpStream::connect(gateway.metrics).unwrap());
    assert_eq!(runtime.block_on(dropped(&mut client)), 0);
    let page = get(&mut scrapes, "/metrics");
    assert!(page.contains("\nvipgate_ready 0\n") && !page.contains("worker=\"0\""), "{page}");
    assert_eq!(get(&mut scrapes, "/readyz"), "not ready\n");

    gateway.start_engine(&[Worker::Replies(sessions(3), 2)], None);
    gateway.state.ready.store(true, Ordering::Relaxed);
    let page = get(&mut scrapes, "/metrics");
    assert!(page.contains("\nvipgate_ready 1\n") && page.contains("vipgate_sessions{worker=\"0\"} 20\n"), "{page}");
    assert!(page.contains("\nvipgate_connections{listener=\"metrics\"} 1\n"), "the same connection: {page}");
    assert_eq!(get(&mut scrapes, "/readyz"), "ready\n");
    assert_eq!(runtime.block_on(dropped(&mut client)), 1);
}

#[test]
fn a_capture_that_started_before_the_engine_captures_at_its_workers() {
    let gateway = waiting();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(async {
        let mut client = Client::connect(&gateway.socket()).await.unwrap();
        client.send(&Request::Capture(CaptureRequest::default())).await.unwrap();
        assert_eq!(client.next::<CaptureReply>().await.unwrap().unwrap().interfaces, ["gw-in"]);
        // A worker that accepts no commands ends the capture with an error.
        gateway.start_engine(&[Worker::Stopped], None);
        loop {
            match client.next::<CaptureReply>().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the capture ended without an error"),
                Err(error) => return error.to_string(),
            }
        }
    });
    assert!(error.contains("worker 0 accepts no commands"), "{error}");
}
