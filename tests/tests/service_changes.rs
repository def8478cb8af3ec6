//! Backends that come, drain and go while clients connect all the time and hold connections open.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vipgate::lab::Host;
use vipgate_tests::services::{
    Answer, Backend, Connection, Served, TCP, UDP, VIP, ask_tcp, ask_udp, connect, ready, terminating,
};
use vipgate_tests::{World, wait_for};

const P1: &str = "10.1.0.11";
const P2: &str = "10.1.0.12";
const P4: &str = "10.1.0.31";

fn world(tag: &str, served: &Served<'_>) -> World {
    let mut world = World::new(tag);
    world.start_backends();
    world.serve(served);
    world.start("node: node-1");
    world
}

/// When somebody asked, whether by TCP, and what he heard.
type Asked<T = Answer> = (Instant, bool, T);

/// New connections, one after the other, until told to stop: when, and who answered.
#[derive(Debug)]
struct Callers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Asked<std::io::Result<Answer>>>>>,
}

impl Callers {
    fn start(client: &Host) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let call = |tcp: bool| {
            let (client, stop) = (client.clone(), stop.clone());
            thread::spawn(move || {
                let mut answers = Vec::new();
                while !stop.load(Relaxed) {
                    let begin = Instant::now();
                    let answer = if tcp { ask_tcp(&client, (VIP[0], TCP)) } else { ask_udp(&client, (VIP[0], UDP), 8) };
                    answers.push((begin, tcp, answer));
                    thread::sleep(Duration::from_millis(5));
                }
                answers
            })
        };
        Self { threads: [true, true, false].map(call).into(), stop }
    }

    /// Everything that was answered; nothing was not.
    fn end(self) -> Vec<Asked> {
        self.stop.store(true, Relaxed);
        let all = self.threads.into_iter().flat_map(|thread| thread.join().unwrap());
        all.map(|(at, tcp, answer)| (at, tcp, answer.unwrap_or_else(|error| panic!("not answered: {error}")))).collect()
    }
}

/// Connections that are held open, by backend.
fn held(client: &Host, count: usize) -> BTreeMap<String, Vec<Connection>> {
    let mut held: BTreeMap<String, Vec<Connection>> = BTreeMap::new();
    for _ in 0..count {
        let mut connection = connect(client, (VIP[0], TCP)).unwrap();
        let answer = connection.ask().unwrap();
        held.entry(answer.backend).or_default().push(connection);
    }
    held
}

fn all_answer(held: &mut BTreeMap<String, Vec<Connection>>) {
    for (backend, connections) in held {
        for connection in connections {
            let answer = connection.ask().unwrap();
            assert_eq!((&answer.backend, answer.seen), (backend, answer.own));
        }
    }
}

#[test]
fn backends_come_drain_and_go_under_load_and_nobody_else_notices() {
    let two = [ready(P1), ready(P2)];
    let world = world("svcchange", &Served { backends: &two, ..Served::default() });
    let callers = Callers::start(&world.server);
    let mut held = held(&world.server, 40);
    assert_eq!(held.keys().collect::<Vec<_>>(), ["p1", "p2"]);
    // One comes.
    world.serve(&Served { backends: &[ready(P1), ready(P2), ready(P4)], ..Served::default() });
    let three = Instant::now();
    all_answer(&mut held);
    thread::sleep(Duration::from_secs(1));
    // One drains: what it has, it keeps.
    world.serve(&Served { backends: &[terminating(P1), ready(P2), ready(P4)], ..Served::default() });
    let drains = Instant::now();
    all_answer(&mut held);
    thread::sleep(Duration::from_secs(1));
    all_answer(&mut held);
    // And is gone: its connections end, those of others stay. What their clients still send is nobody's.
    world.ledger.expect(["no_session"]);
    world.serve(&Served { backends: &[ready(P2), ready(P4)], ..Served::default() });
    let mut lost = held.remove("p1").unwrap();
    assert!(lost[0].ask().is_err());
    all_answer(&mut held);
    let answers = callers.end();
    // By UDP, a port that comes again is the same session, and stays where it is.
    let names = |from: Instant, until: Instant| {
        let then = answers.iter().filter(|(at, tcp, _)| *tcp && (from..until).contains(at));
        let mut names: Vec<_> = then.map(|(.., answer)| &*answer.backend).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let end = Instant::now();
    assert_eq!(names(three, drains), ["p1", "p2", "p4"]);
    assert_eq!(names(drains, end), ["p2", "p4"], "nobody new for one who drains");
    assert!(answers.iter().all(|(.., answer)| answer.seen == answer.own));
    assert!(answers.len() > 100, "{}", answers.len());
    world.check_frames();
}

#[test]
fn datagrams_of_one_client_move_on_when_their_backend_is_gone() {
    let world = world("svcudp", &Served { backends: &[ready(P1), ready(P2)], ..Served::default() });
    let server = world.server.clone();
    let to: std::net::SocketAddr = format!("{}:{UDP}", VIP[0]).parse().unwrap();
    let (said, hear) = std::sync::mpsc::channel();
    let (next, wait) = std::sync::mpsc::channel::<()>();
    let asking = server.run(move || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(Duration::from_secs(3)))?;
        socket.connect(to)?;
        while wait.recv().is_ok() {
            socket.send(b"?")?;
            let mut answer = [0; 256];
            let length = socket.recv(&mut answer)?;
            let text = String::from_utf8_lossy(&answer[..length]).into_owned();
            said.send(text.split(' ').next().unwrap_or_default().to_owned()).map_err(std::io::Error::other)?;
        }
        Ok(())
    });
    let ask = || {
        next.send(()).unwrap();
        hear.recv_timeout(Duration::from_secs(4)).unwrap()
    };
    let first = ask();
    let (stays, name) = if first == "p1" { (P2, "p2") } else { (P1, "p1") };
    assert_eq!(ask(), first);
    world.serve(&Served { backends: &[ready(stays)], ..Served::default() });
    assert_eq!(ask(), name, "the very next one");
    drop(next);
    asking.join().unwrap().unwrap();
}

#[test]
fn a_client_stays_with_its_backend_while_others_come_and_finds_another_when_it_goes() {
    fn sticky(backends: &[Backend]) -> Served<'_> {
        Served { spec: "  sessionAffinity: ClientIP", backends, ..Served::default() }
    }
    let world = world("svcstick", &sticky(&[ready(P1), ready(P2)]));
    let home = ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend;
    let same = |count: usize, expected: &str| {
        (0..count).all(|_| ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend == expected)
    };
    assert!(same(70, &home));
    world.serve(&sticky(&[ready(P1), ready(P2), ready(P4)]));
    assert!(same(20, &home));
    let (gone, stays) = if home == "p1" { (P1, P2) } else { (P2, P1) };
    world.serve(&sticky(&[terminating(gone), ready(stays), ready(P4)]));
    let other = ask_tcp(&world.server, (VIP[0], TCP)).unwrap().backend;
    assert!(other != home && same(30, &other), "{other}");
    assert!(wait_for(Duration::from_secs(2), || world.served()["affinity_seconds"] == 10_800));
}
