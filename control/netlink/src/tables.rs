//! The kernel's tables, dumped whole, and single entries of them.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{DecodeError, Parseable};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage};
use netlink_packet_route::rule::RuleMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::PROTOCOL;
use crate::client::Client;
use crate::event::decode::{self, RTM_GETNEXTHOP, RTM_NEWNEXTHOP};
use crate::event::{Address, Link, Neighbor, NextHopObject, Route};
use crate::message::{Message, Request};

/// Length of struct nhmsg.
const NEXTHOP_HEADER: usize = 8;
/// Both families, as tables are dumped.
pub const FAMILIES: [AddressFamily; 2] = [AddressFamily::Inet, AddressFamily::Inet6];

#[expect(clippy::missing_errors_doc, reason = "each fails as `dump` and `get` do")]
impl Client {
    /// All devices.
    pub async fn links(&mut self) -> io::Result<Vec<Link>> {
        self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()), of_kind(libc::RTM_NEWLINK, decode::link)).await
    }

    /// The device with this name.
    pub async fn link_by_name(&mut self, name: &str) -> io::Result<Option<Link>> {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.link(request).await
    }

    /// The device with this index.
    pub async fn link_by_index(&mut self, ifindex: u32) -> io::Result<Option<Link>> {
        let mut request = LinkMessage::default();
        request.header.index = ifindex;
        self.link(request).await
    }

    async fn link(&mut self, request: LinkMessage) -> io::Result<Option<Link>> {
        self.get(RouteNetlinkMessage::GetLink(request), of_kind(libc::RTM_NEWLINK, decode::link)).await
    }

    /// The addresses of all devices.
    pub async fn addresses(&mut self) -> io::Result<Vec<Address>> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.dump(request, of_kind(libc::RTM_NEWADDR, decode::address)).await
    }

    /// The neighbors of all devices.
    pub async fn neighbors(&mut self) -> io::Result<Vec<Neighbor>> {
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        self.dump(request, of_kind(libc::RTM_NEWNEIGH, decode::neighbor)).await
    }

    /// One neighbor.
    pub async fn neighbor(&mut self, ifindex: u32, address: IpAddr) -> io::Result<Option<Neighbor>> {
        let request = RouteNetlinkMessage::GetNeighbour(neighbor_message(ifindex, address));
        self.get(request, of_kind(libc::RTM_NEWNEIGH, decode::neighbor)).await
    }

    /// The routes of all tables, those of one prefix and metric in the kernel's order of preference.
    pub async fn routes(&mut self) -> io::Result<Vec<Route>> {
        let mut routes = Vec::new();
        for family in FAMILIES {
            routes.extend(self.dump(route_dump(family), of_kind(libc::RTM_NEWROUTE, decode::route)).await?);
        }
        Ok(routes)
    }

    /// vipgate's routes of one family, whole: a route is deleted by what it was listed as.
    pub async fn own_routes(&mut self, family: AddressFamily) -> io::Result<Vec<RouteMessage>> {
        let decode = |body: &[u8]| {
            let is_ours = RouteHeader::parse(body)?.protocol == PROTOCOL.into();
            is_ours.then(|| RouteMessage::parse(body)).transpose()
        };
        self.dump(route_dump(family), of_kind(libc::RTM_NEWROUTE, decode)).await
    }

    /// The index of the device by which packets to an address leave.
    pub async fn device_toward(&mut self, address: IpAddr) -> io::Result<Option<u32>> {
        let mut request = RouteMessage::default();
        request.header.address_family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        request.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        request.attributes.push(RouteAttribute::Destination(address.into()));
        let device = |body: &[u8]| {
            let attributes = RouteMessage::parse(body)?.attributes;
            Ok(attributes.iter().find_map(|it| if let RouteAttribute::Oif(index) = it { Some(*index) } else { None }))
        };
        self.get(RouteNetlinkMessage::GetRoute(request), of_kind(libc::RTM_NEWROUTE, device)).await
    }

    /// The rules of one family, whole.
    pub async fn rules(&mut self, family: AddressFamily) -> io::Result<Vec<RuleMessage>> {
        let mut request = RuleMessage::default();
        request.header.family = family;
        let decode = |body: &[u8]| RuleMessage::parse(body).map(Some);
        self.dump(RouteNetlinkMessage::GetRule(request), of_kind(libc::RTM_NEWRULE, decode)).await
    }

    /// The nexthop objects. Linux before 5.3 has none.
    pub async fn next_hops(&mut self) -> io::Result<Vec<NextHopObject>> {
        // All zero is any family.
        let request = Request::new(RTM_GETNEXTHOP, &[0; NEXTHOP_HEADER]);
        let decode = of_kind(RTM_NEWNEXTHOP, |body| decode::next_hop(body).map(Some));
        match self.dump(request, decode).await {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Vec::new()),
            result => result,
        }
    }
}

fn route_dump(family: AddressFamily) -> RouteNetlinkMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    RouteNetlinkMessage::GetRoute(request)
}

/// The message that names a neighbor.
pub fn neighbor_message(ifindex: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = ifindex;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    message
}

/// Decodes messages of one type, and skips others.
fn of_kind<T>(
    kind: u16,
    decode: impl Fn(&[u8]) -> Result<Option<T>, DecodeError>,
) -> impl Fn(&Message<'_>) -> Result<Option<T>, DecodeError> {
    move |message| if message.kind == kind { decode(message.body) } else { Ok(None) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task can hold it while it waits.
    fn spawned<F: Future + Send + 'static>(future: F) -> F {
        future
    }

    #[tokio::test]
    async fn the_loopback_device_is_listed_and_found() {
        let mut client = Client::open(netlink_sys::protocols::NETLINK_ROUTE).unwrap();
        let links = spawned(async move {
            let links = client.links().await.unwrap();
            client.addresses().await.unwrap();
            client.neighbors().await.unwrap();
            client.routes().await.unwrap();
            client.next_hops().await.unwrap();
            for family in FAMILIES {
                client.own_routes(family).await.unwrap();
                client.rules(family).await.unwrap();
            }
            (client, links)
        });
        let (mut client, links) = links.await;
        let loopback = links.iter().find(|link| link.name == "lo").unwrap();
        assert_eq!(loopback.hardware_type, libc::ARPHRD_LOOPBACK);
        assert_eq!(client.link_by_name("lo").await.unwrap().as_ref(), Some(loopback));
        assert_eq!(client.link_by_index(loopback.ifindex).await.unwrap().as_ref(), Some(loopback));
        assert_eq!(client.link_by_name("vipgate-none").await.unwrap(), None);
        assert_eq!(client.link_by_index(i32::MAX as u32).await.unwrap(), None);
        assert_eq!(client.device_toward([127, 0, 0, 1].into()).await.unwrap(), Some(loopback.ifindex));
        assert_eq!(client.neighbor(loopback.ifindex, [192, 0, 2, 1].into()).await.unwrap(), None);
    }
}
