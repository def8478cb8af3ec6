//! The server: returns lines and datagrams, and records which client sent what from where.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex};
use std::{mem, net};

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

use super::{decode, take_lines};
use crate::cluster::ServerRecord;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 4096;
/// Receive buffer of the UDP sockets in bytes, as far as the kernel allows it.
const DATAGRAM_BUFFER: usize = 8 << 20;
/// Bytes of a connection that are read at once: there are thousands of them, with short lines.
const READ_SIZE: usize = 2048;
/// The largest datagram.
const MAX_DATAGRAM: usize = 65_536;

/// Datagrams of UDP flows, by the client's address, the address that it called, and its identity.
type Flows = BTreeMap<(SocketAddr, IpAddr, String), u64>;
/// Connections, in the order in which they were accepted.
type Connections = Arc<Mutex<Vec<ServerRecord>>>;

/// A server that is bound to its ports.
#[derive(Debug)]
pub(super) struct Server {
    lines: TcpListener,
    datagrams: [UdpSocket; 2],
}

impl Server {
    /// Binds the ports, in a Tokio runtime.
    pub(super) fn bind(port: u16) -> io::Result<Self> {
        Ok(Self {
            lines: listen(port)?,
            datagrams: [
                datagram_socket((Ipv4Addr::UNSPECIFIED, port).into())?,
                datagram_socket((Ipv6Addr::UNSPECIFIED, port).into())?,
            ],
        })
    }

    /// Serves until `stop`; the clients that it has seen.
    pub(super) async fn run(self, stop: impl Future<Output = ()>) -> io::Result<Vec<ServerRecord>> {
        let (connections, mut flows) = (Connections::default(), [Flows::new(), Flows::new()]);
        let ([ipv4, ipv6], [ipv4_flows, ipv6_flows]) = (&self.datagrams, &mut flows);
        let serve = async {
            tokio::try_join!(
                accept_lines(&self.lines, &connections),
                echo_datagrams(ipv4, ipv4_flows),
                echo_datagrams(ipv6, ipv6_flows),
            )
        };
        tokio::select! {
            outcome = serve => {
                outcome?;
            }
            () = stop => {}
        }
        let mut records = mem::take(&mut *connections.lock().unwrap());
        records.extend(flows.into_iter().flatten().map(|((peer, local, identity), lines)| ServerRecord {
            identity,
            lines,
            ..new_record(true, peer, local)
        }));
        Ok(records)
    }
}

/// The record of a client that has sent nothing.
pub(super) fn new_record(udp: bool, peer: SocketAddr, local: IpAddr) -> ServerRecord {
    let text = |address: IpAddr| address.to_canonical().to_string();
    let peer = (text(peer.ip()), peer.port());
    ServerRecord { udp, peer, local: text(local), identity: String::new(), lines: 0, errors: 0 }
}

/// A listener for both families.
fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv6Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// A UDP socket of one family that receives the addresses to which datagrams were sent.
fn datagram_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)?;
    if address.is_ipv4() {
        setsockopt(&socket, Ipv4PacketInfo, &true)?;
    } else {
        sockopt::set_ipv6_v6only(&socket, true)?;
        setsockopt(&socket, Ipv6RecvPacketInfo, &true)?;
    }
    sockopt::set_socket_recv_buffer_size(&socket, DATAGRAM_BUFFER)?;
    bind(&socket, &address)?;
    UdpSocket::from_std(net::UdpSocket::from(socket))
}

async fn accept_lines(listener: &TcpListener, connections: &Connections) -> io::Result<()> {
    loop {
        let (stream, peer) = listener.accept().await?;
        let record = new_record(false, peer, stream.local_addr()?.ip());
        let number = {
            let mut connections = connections.lock().unwrap();
            connections.push(record);
            connections.len() - 1
        };
        tokio::spawn(echo_lines(stream, connections.clone(), number));
    }
}

/// Returns what a connection sends, and counts its lines.
async fn echo_lines(mut stream: TcpStream, connections: Connections, number: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_tcp_thin_linear_timeouts(&stream, true)?;
    let (mut data, mut received, mut expected) = (vec![0; READ_SIZE], Vec::new(), None);
    loop {
        let length = stream.read(&mut data).await?;
        if length == 0 {
            return Ok(());
        }
        received.extend_from_slice(&data[..length]);
        take_lines(&mut received, |line| count_line(&mut connections.lock().unwrap()[number], &mut expected, line));
        stream.write_all(&data[..length]).await?;
    }
}

/// Counts a line of a connection. `expected` is its identity and number, once there was a line.
pub(super) fn count_line(record: &mut ServerRecord, expected: &mut Option<(u32, u64)>, line: &[u8]) {
    let found = decode(line);
    if record.lines == 0 {
        record.identity = identity(line);
        *expected = found;
    }
    if found.is_none() || found != *expected {
        record.errors += 1;
    }
    if let Some((_, number)) = expected {
        *number += 1;
    }
    record.lines += 1;
}

/// The identity at the start of a payload, whatever it is.
fn identity(payload: &[u8]) -> String {
    String::from_utf8_lossy(&payload[..payload.len().min(8)]).into_owned()
}

/// Returns each datagram from the address to which it was sent.
async fn echo_datagrams(socket: &UdpSocket, flows: &mut Flows) -> io::Result<()> {
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        let received = socket.async_io(Interest::READABLE, || receive(socket, &mut buffer)).await;
        // An error is about a single datagram.
        let Ok((length, peer, local)) = received else { continue };
        let datagram = &buffer[..length];
        *flows.entry((peer, local, identity(datagram))).or_default() += 1;
        // A reply that can't be sent is lost.
        let _ = reply(socket, datagram, local, peer);
    }
}

/// Receives a datagram: its length, its sender, and the address to which it was sent.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, IpAddr)> {
    // That of IPv4 is shorter.
    let mut control = nix::cmsg_space!(in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty())?;
    let local = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes())),
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(IpAddr::from(info.ipi6_addr.s6_addr)),
        _ => None,
    });
    let peer = message.address.and_then(|address| {
        let ipv4 = address.as_sockaddr_in().map(|address| SocketAddr::from(*address));
        ipv4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::from(*address)))
    });
    let (peer, local) = peer.zip(local).ok_or(io::ErrorKind::InvalidData)?;
    Ok((message.bytes, peer, local))
}

/// Sends a datagram from an address of this host.
fn reply(socket: &UdpSocket, datagram: &[u8], local: IpAddr, peer: SocketAddr) -> io::Result<()> {
    let (ipv4, ipv6);
    let source = match local {
        IpAddr::V4(address) => {
            let local = in_addr { s_addr: u32::from_ne_bytes(address.octets()) };
            ipv4 = in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: local, ipi_addr: in_addr { s_addr: 0 } };
            ControlMessage::Ipv4PacketInfo(&ipv4)
        }
        IpAddr::V6(address) => {
            ipv6 = in6_pktinfo { ipi6_addr: in6_addr { s6_addr: address.octets() }, ipi6_ifindex: 0 };
            ControlMessage::Ipv6PacketInfo(&ipv6)
        }
    };
    let peer = SockaddrStorage::from(peer);
    sendmsg(socket.as_raw_fd(), &[IoSlice::new(datagram)], &[source], MsgFlags::empty(), Some(&peer))?;
    Ok(())
}
