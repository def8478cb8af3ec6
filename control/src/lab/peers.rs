//! The far side, and pods that serve: a web server and a UDP server that tell whoever asks which address they see.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use super::Host;

/// Port of the web server.
pub const HTTP: u16 = 80;
/// Port of the UDP server.
pub const UDP: u16 = 5353;
const PATIENCE: Duration = Duration::from_secs(3);

/// Starts both on a host, UDP on each of its addresses; they end with the process.
pub fn start(host: &Host, addresses: &[&str]) {
    start_at(host, addresses, HTTP);
}

/// The same with the web server on another port.
pub fn start_at(host: &Host, addresses: &[&str], http: u16) {
    // Threads of a server that can't start are missed by the checks, which say what they waited for.
    drop(host.run(move || {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, http))?;
        for stream in listener.incoming() {
            let stream = stream?;
            thread::spawn(move || answer(stream));
        }
        Ok(())
    }));
    // A socket for all addresses would answer from whichever the kernel likes best.
    for address in addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()) {
        drop(host.run::<()>(move || {
            let socket = UdpSocket::bind((address, UDP))?;
            let mut question = [0; 64];
            loop {
                let (_, peer) = socket.recv_from(&mut question)?;
                socket.send_to(peer.ip().to_string().as_bytes(), peer)?;
            }
        }));
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let peer = unmapped(stream.peer_addr()?).ip().to_string();
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{peer}", peer.len())
}

/// An IPv4 peer of a socket for both families looks like an IPv6 one.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Asks the web server from a host; the address that it saw.
///
/// # Errors
/// When nobody answers in time.
pub fn ask_http(host: &Host, server: IpAddr) -> io::Result<String> {
    ask_http_at(host, (server, HTTP).into())
}

/// The same on another port.
///
/// # Errors
/// When nobody answers in time.
pub fn ask_http_at(host: &Host, server: SocketAddr) -> io::Result<String> {
    join(host.run(move || {
        let mut stream = TcpStream::connect_timeout(&server, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: demo\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.rsplit("\r\n\r\n").next().unwrap_or_default().to_owned())
    }))
}

/// Asks the UDP server from a host; the address that it saw. One datagram: nothing is asked twice.
///
/// # Errors
/// When nobody answers in time.
pub fn ask_udp(host: &Host, server: IpAddr) -> io::Result<String> {
    ask_udp_at(host, (server, UDP).into())
}

/// The same on another port.
///
/// # Errors
/// When nobody answers in time.
pub fn ask_udp_at(host: &Host, server: SocketAddr) -> io::Result<String> {
    join(host.run(move || {
        let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.send_to(b"who am I?", server)?;
        let mut answer = [0; 64];
        let (length, _) = socket.recv_from(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }))
}

/// What a thread has come to.
pub(super) fn join<T>(thread: thread::JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread of the demo died")))
}
