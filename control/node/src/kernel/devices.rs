//! Devices: the VXLAN device of all tunnels (its routes say where each ends), and what must hold for it and the one of
//! held packets.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use vipgate_netlink::packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use vipgate_netlink::packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use vipgate_netlink::packet_route::neighbour::{NeighbourAttribute, NeighbourState};
use vipgate_netlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use vipgate_netlink::{Client, Link, LinkState, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, neighbor_message};

use super::sysctls::Sysctls;
use crate::error::{NodeError, is_errno};
use crate::policy::TunnelEndpoint;
use crate::tunnel::{DEVICE_V4, NEXT_HOP_MAC, NEXT_HOP_V4, NEXT_HOP_V6};

/// Brings the tunnel device in line; how many changes that took.
pub(super) async fn ensure_tunnel(
    client: &mut Client,
    name: &str,
    own: &TunnelEndpoint,
    mtu: u32,
    sysctls: &Sysctls,
) -> Result<usize, NodeError> {
    let mut changed = 0;
    let mut link = find(client, name).await?;
    if let Some(other) = link.take_if(|link| link.metadata_vxlan_port != Some(own.address.port())) {
        delete(client, other.ifindex).await.map_err(failed("removing", name))?;
        changed += 1;
    }
    let index = if let Some(link) = &link {
        link.ifindex
    } else {
        let device = RouteNetlinkMessage::NewLink(tunnel_device(name, own, mtu));
        client.set(device, NLM_F_CREATE | NLM_F_EXCL).await.map_err(failed("creating", name))?;
        changed += 1;
        index(client, name).await?.unwrap_or_default()
    };
    if !link.is_some_and(|link| is_up(&link) && link.mtu == mtu && link.mac == Some(own.mac)) {
        // Without an address of its own the kernel would announce one of each family.
        sysctls.write(name, "ipv6", "addr_gen_mode", "1")?;
        let attributes = vec![LinkAttribute::Mtu(mtu), LinkAttribute::Address(own.mac.to_vec())];
        client.set(bring_up(index, attributes), 0).await.map_err(failed("changing", name))?;
        changed += 1;
    }
    changed += ensure_forwarding(client, name, index, sysctls).await?;
    for (is_ipv6, hop) in [(false, IpAddr::from(NEXT_HOP_V4)), (true, IpAddr::from(NEXT_HOP_V6))] {
        let mut neighbor = neighbor_message(index, hop);
        neighbor.header.state = NeighbourState::Permanent;
        neighbor.attributes.push(NeighbourAttribute::LinkLayerAddress(NEXT_HOP_MAC.to_vec()));
        match client.set(RouteNetlinkMessage::NewNeighbour(neighbor), NLM_F_CREATE | NLM_F_REPLACE).await {
            Err(_) if is_ipv6 && !sysctls.has_ipv6(name) => {}
            result => result.map_err(failed("adding the next hop of", name))?,
        }
    }
    Ok(changed)
}

/// Brings the device of held packets in line, if it is there; how many changes that took.
pub(super) async fn ensure_hold(client: &mut Client, name: &str, sysctls: &Sysctls) -> Result<usize, NodeError> {
    let Some(link) = find(client, name).await? else { return Ok(0) };
    let mut changed = 0;
    if !is_up(&link) {
        sysctls.write(name, "ipv6", "addr_gen_mode", "1")?;
        client.set(bring_up(link.ifindex, Vec::new()), 0).await.map_err(failed("changing", name))?;
        changed += 1;
    }
    Ok(changed + ensure_forwarding(client, name, link.ifindex, sysctls).await?)
}

/// Lets packets with any source in, and forwards them: replies come from everywhere, and the way back to a remote isn't
/// this device. The address is only there because the reverse path filter drops everything without one.
async fn ensure_forwarding(client: &mut Client, name: &str, index: u32, sysctls: &Sysctls) -> Result<usize, NodeError> {
    let (mut changed, own) = (0, IpAddr::from(DEVICE_V4));
    for (family, setting, value) in [
        ("ipv4", "rp_filter", "2"),
        ("ipv4", "forwarding", "1"),
        ("ipv6", "forwarding", "1"),
        ("ipv6", "accept_ra", "0"),
    ] {
        changed += usize::from(sysctls.write(name, family, setting, value)?);
    }
    let addresses = client.addresses().await.map_err(failed("listing addresses of", name))?;
    if !addresses.iter().any(|address| address.ifindex == index && address.ip == own) {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.index = index;
        message.header.prefix_len = 32;
        message.header.scope = AddressScope::Host;
        message.attributes = vec![AddressAttribute::Address(own), AddressAttribute::Local(own)];
        match client.set(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL).await {
            Err(error) if is_errno(&error, libc::EEXIST) => {}
            result => result.map_err(failed("adding an address to", name))?,
        }
        changed += 1;
    }
    Ok(changed)
}

/// The VXLAN device of all tunnels: where each ends, and its VNI, is in the metadata that a route gives to packets.
fn tunnel_device(name: &str, own: &TunnelEndpoint, mtu: u32) -> LinkMessage {
    let vxlan = vec![
        InfoVxlan::Id(0),
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Learning(false),
        InfoVxlan::Port(own.address.port()),
    ];
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(vxlan))]),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::Address(own.mac.to_vec()),
    ];
    message
}

fn is_up(link: &Link) -> bool {
    link.state() != LinkState::Down
}

/// Brings a device up, and sets these attributes of it.
fn bring_up(index: u32, attributes: Vec<LinkAttribute>) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = attributes;
    RouteNetlinkMessage::SetLink(message)
}

/// The index of a device.
pub(super) async fn index(client: &mut Client, name: &str) -> Result<Option<u32>, NodeError> {
    Ok(find(client, name).await?.map(|link| link.ifindex))
}

async fn find(client: &mut Client, name: &str) -> Result<Option<Link>, NodeError> {
    client.link_by_name(name).await.map_err(failed("looking up", name))
}

async fn delete(client: &mut Client, index: u32) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    client.set(RouteNetlinkMessage::DelLink(message), 0).await
}

/// Removes a device, if it is there.
pub(super) async fn remove(client: &mut Client, name: &str) -> Result<(), NodeError> {
    let Some(index) = index(client, name).await? else { return Ok(()) };
    delete(client, index).await.map_err(failed("removing", name))
}

/// All addresses of all devices.
pub(super) async fn local_addresses(client: &mut Client) -> Result<BTreeSet<IpAddr>, NodeError> {
    let addresses = client.addresses().await.map_err(NodeError::of("listing addresses"))?;
    Ok(addresses.into_iter().map(|address| address.ip).collect())
}

/// The MTU of the interface that leads to an address; `None`: there is no route, which is an error to the kernel.
pub(super) async fn mtu_toward(client: &mut Client, address: IpAddr) -> Option<u32> {
    let device = client.device_toward(address).await.ok()??;
    client.link_by_index(device).await.ok()?.map(|link| link.mtu)
}

fn failed(action: &'static str, device: &str) -> impl FnOnce(io::Error) -> NodeError {
    NodeError::of(format!("{action} {device}"))
}
