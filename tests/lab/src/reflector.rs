//! Reflectors: an HTTP and a UDP server that reply with the client's source address, and their clients.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use crate::Host;

/// Port of the HTTP server.
pub const HTTP: u16 = 80;
/// Port of the UDP server.
pub const UDP: u16 = 5353;
const TIMEOUT: Duration = Duration::from_secs(3);

/// Starts both servers on a host, UDP on each of its addresses; they end with the process.
pub fn start(host: &Host, addresses: &[&str]) {
    start_at(host, addresses, HTTP);
}

/// Starts both servers, with HTTP on another port.
pub fn start_at(host: &Host, addresses: &[&str], http: u16) {
    // Errors are dropped: a server that can't start makes the checks fail.
    drop(host.run(move || {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, http))?;
        for stream in listener.incoming() {
            let stream = stream?;
            thread::spawn(move || reply(stream));
        }
        Ok(())
    }));
    // One socket per address: a wildcard socket would reply from an address that the kernel selects.
    for address in addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok()) {
        drop(host.run::<()>(move || {
            let socket = UdpSocket::bind((address, UDP))?;
            let mut request = [0; 64];
            loop {
                let (_, peer) = socket.recv_from(&mut request)?;
                socket.send_to(peer.ip().to_string().as_bytes(), peer)?;
            }
        }));
    }
}

fn reply(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    let peer = unmapped(stream.peer_addr()?).ip().to_string();
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{peer}", peer.len())
}

/// Converts an IPv4-mapped IPv6 address, as dual-stack sockets have them, to IPv4.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Sends an HTTP request from a host; returns the source address that the server saw.
///
/// # Errors
/// When there is no reply in time.
pub fn query_http(host: &Host, server: IpAddr) -> io::Result<String> {
    query_http_at(host, (server, HTTP).into())
}

/// Sends an HTTP request to another port.
///
/// # Errors
/// When there is no reply in time.
pub fn query_http_at(host: &Host, server: SocketAddr) -> io::Result<String> {
    join(host.run(move || {
        let mut stream = TcpStream::connect_timeout(&server, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: demo\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response.rsplit("\r\n\r\n").next().unwrap_or_default().to_owned())
    }))
}

/// Sends one datagram from a host, without retransmission; returns the source address that the server saw.
///
/// # Errors
/// When there is no reply in time.
pub fn query_udp(host: &Host, server: IpAddr) -> io::Result<String> {
    query_udp_at(host, (server, UDP).into())
}

/// Sends one datagram to another port.
///
/// # Errors
/// When there is no reply in time.
pub fn query_udp_at(host: &Host, server: SocketAddr) -> io::Result<String> {
    join(host.run(move || {
        let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.send_to(b"who am I?", server)?;
        let mut reply = [0; 64];
        let (length, _) = socket.recv_from(&mut reply)?;
        Ok(String::from_utf8_lossy(&reply[..length]).into_owned())
    }))
}

/// Joins a thread; a panic is an error.
pub(crate) fn join<T>(thread: thread::JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread of the lab panicked")))
}
