//! Devices: the VXLAN device of all tunnels (its routes say where each ends), and what must hold for it and the one of
//! held packets.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::TryStreamExt;
use rtnetlink::packet_route::address::{AddressAttribute, AddressScope};
use rtnetlink::packet_route::link::{InfoData, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::RouteAttribute;
use rtnetlink::{Handle, LinkUnspec, LinkVxlan, RouteMessageBuilder};

use super::error::{KernelError, is_errno};
use super::sysctls::Sysctls;
use crate::policy::TunnelEndpoint;
use crate::tunnel::{DEVICE_V4, NEXT_HOP_MAC, NEXT_HOP_V4, NEXT_HOP_V6};

/// Brings the tunnel device in line; how many changes that took.
pub(super) async fn ensure_tunnel(
    handle: &Handle,
    name: &str,
    own: &TunnelEndpoint,
    mtu: u32,
    sysctls: &Sysctls,
) -> Result<usize, KernelError> {
    let mut changed = 0;
    let mut link = find(handle, name).await?;
    if let Some(other) = link.take_if(|link| !is_tunnel_device(link, own)) {
        handle.link().del(other.header.index).execute().await.map_err(failed("removing", name))?;
        changed += 1;
    }
    let index = if let Some(link) = &link {
        link.header.index
    } else {
        let device = LinkVxlan::new(name, 0).collect_metadata(true).learning(false).port(own.address.port());
        let device = device.address(own.mac.to_vec()).mtu(mtu);
        handle.link().add(device.build()).execute().await.map_err(failed("creating", name))?;
        changed += 1;
        index(handle, name).await?.unwrap_or_default()
    };
    let is_up = |link: &LinkMessage| link.header.flags.contains(LinkFlags::Up);
    let has_mtu = |link: &LinkMessage| link.attributes.contains(&LinkAttribute::Mtu(mtu));
    let has_mac = |link: &LinkMessage| link.attributes.contains(&LinkAttribute::Address(own.mac.to_vec()));
    if !link.as_ref().is_some_and(|link| is_up(link) && has_mtu(link) && has_mac(link)) {
        // Without an address of its own the kernel would announce one of each family.
        sysctls.write(name, "ipv6", "addr_gen_mode", "1")?;
        let change = LinkUnspec::new_with_index(index).mtu(mtu).address(own.mac.to_vec()).up().build();
        handle.link().set(change).execute().await.map_err(failed("changing", name))?;
        changed += 1;
    }
    changed += ensure_forwarding(handle, name, index, sysctls).await?;
    for (family, hop) in [(false, IpAddr::from(NEXT_HOP_V4)), (true, IpAddr::from(NEXT_HOP_V6))] {
        let request = handle.neighbours().add(index, hop).link_layer_address(&NEXT_HOP_MAC);
        match request.state(NeighbourState::Permanent).replace().execute().await {
            Err(_) if family && !sysctls.has_ipv6(name) => {}
            result => result.map_err(failed("adding the next hop of", name))?,
        }
    }
    Ok(changed)
}

/// Brings the device of held packets in line, if it is there; how many changes that took.
pub(super) async fn ensure_hold(handle: &Handle, name: &str, sysctls: &Sysctls) -> Result<usize, KernelError> {
    let Some(link) = find(handle, name).await? else { return Ok(0) };
    let index = link.header.index;
    let mut changed = 0;
    if !link.header.flags.contains(LinkFlags::Up) {
        sysctls.write(name, "ipv6", "addr_gen_mode", "1")?;
        let change = LinkUnspec::new_with_index(index).up().build();
        handle.link().set(change).execute().await.map_err(failed("changing", name))?;
        changed += 1;
    }
    Ok(changed + ensure_forwarding(handle, name, index, sysctls).await?)
}

/// Lets packets with any source in, and forwards them: replies come from everywhere, and the way back to a remote isn't
/// this device. The address is only there because the reverse path filter drops everything without one.
async fn ensure_forwarding(handle: &Handle, name: &str, index: u32, sysctls: &Sysctls) -> Result<usize, KernelError> {
    let (mut changed, own) = (0, DEVICE_V4);
    for (family, setting, value) in [
        ("ipv4", "rp_filter", "2"),
        ("ipv4", "forwarding", "1"),
        ("ipv6", "forwarding", "1"),
        ("ipv6", "accept_ra", "0"),
    ] {
        changed += usize::from(sysctls.write(name, family, setting, value)?);
    }
    let mut addresses = handle.address().get().set_link_index_filter(index).execute();
    let mut is_there = false;
    while let Some(message) = addresses.try_next().await.map_err(failed("listing addresses of", name))? {
        is_there |= message.attributes.contains(&AddressAttribute::Address(own.into()));
    }
    if !is_there {
        let mut request = handle.address().add(index, own.into(), 32);
        request.message_mut().header.scope = AddressScope::Host;
        match request.execute().await {
            Err(error) if is_errno(&error, libc::EEXIST) => {}
            result => result.map_err(failed("adding an address to", name))?,
        }
        changed += 1;
    }
    Ok(changed)
}

/// Whether a device is a VXLAN device as [`ensure_tunnel`] creates it.
fn is_tunnel_device(link: &LinkMessage, own: &TunnelEndpoint) -> bool {
    let infos = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let data = infos.into_iter().flatten().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
        _ => None,
    });
    data.is_some_and(|data| {
        data.contains(&InfoVxlan::CollectMetadata(true)) && data.contains(&InfoVxlan::Port(own.address.port()))
    })
}

/// The index of a device.
pub(super) async fn index(handle: &Handle, name: &str) -> Result<Option<u32>, KernelError> {
    Ok(find(handle, name).await?.map(|link| link.header.index))
}

async fn find(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, KernelError> {
    match handle.link().get().match_name(name.to_owned()).execute().try_next().await {
        Err(error) if is_errno(&error, libc::ENODEV) => Ok(None),
        result => result.map_err(failed("looking up", name)),
    }
}

/// Removes a device, if it is there.
pub(super) async fn remove(handle: &Handle, name: &str) -> Result<(), KernelError> {
    let Some(index) = index(handle, name).await? else { return Ok(()) };
    handle.link().del(index).execute().await.map_err(failed("removing", name))
}

/// All addresses of all devices.
pub(super) async fn local_addresses(handle: &Handle) -> Result<BTreeSet<IpAddr>, KernelError> {
    let mut addresses = BTreeSet::new();
    let mut dump = handle.address().get().execute();
    while let Some(message) = dump.try_next().await.map_err(KernelError::request("listing addresses"))? {
        addresses.extend(message.attributes.iter().filter_map(|attribute| match attribute {
            AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
            _ => None,
        }));
    }
    Ok(addresses)
}

/// The MTU of the interface that leads to an address.
pub(super) async fn mtu_toward(handle: &Handle, address: IpAddr) -> Result<Option<u32>, KernelError> {
    let request = match address {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(v4, 32).build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(v6, 128).build(),
    };
    // Without a route there is an error.
    let Ok(Some(route)) = handle.route().get(request).execute().try_next().await else { return Ok(None) };
    let device = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    });
    let Some(device) = device else { return Ok(None) };
    let Ok(Some(link)) = handle.link().get().match_index(device).execute().try_next().await else { return Ok(None) };
    Ok(link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    }))
}

fn failed(action: &'static str, device: &str) -> impl FnOnce(rtnetlink::Error) -> KernelError {
    KernelError::request(format!("{action} {device}"))
}
