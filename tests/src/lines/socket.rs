//! A client's socket.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::net::sockopt;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};

/// A socket that is connected to the server.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

impl Socket {
    /// Connects a socket, without `source` with an address that the kernel chooses.
    pub(super) async fn open(source: Option<IpAddr>, server: SocketAddr, udp: bool) -> io::Result<Self> {
        if udp {
            let any = if server.is_ipv4() { IpAddr::from([0_u8; 4]) } else { IpAddr::from([0_u8; 16]) };
            let socket = UdpSocket::bind((source.unwrap_or(any), 0)).await?;
            socket.connect(server).await?;
            // Before the runtime has polled the socket, sending would block.
            socket.writable().await?;
            return Ok(Self::Udp(socket));
        }
        let socket = if server.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if let Some(source) = source {
            socket.bind((source, 0).into())?;
        }
        socket.set_nodelay(true)?;
        sockopt::set_tcp_thin_linear_timeouts(&socket, true)?;
        let connected = socket.connect(server).await;
        connected.map(Self::Tcp).map_err(|error| io::Error::other(format!("connect: {error}")))
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.readable().await,
            Self::Udp(socket) => socket.readable().await,
        }
    }

    /// Appends what has arrived, within the buffer's capacity.
    pub(super) fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.try_read_buf(buffer),
            Self::Udp(socket) => socket.try_recv_buf(buffer),
        }
    }

    pub(super) fn send(&self, line: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.try_write(line),
            // An ICMP error about an earlier datagram fails the next call, and only that.
            Self::Udp(socket) => match socket.try_send(line) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => socket.try_send(line),
                outcome => outcome,
            },
        }
    }
}
