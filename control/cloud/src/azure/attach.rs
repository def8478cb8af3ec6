//! Attachments: public addresses of IP configurations.
//!
//! Azure refuses an address that is attached elsewhere (`PublicIPAddressInUse`), and a change of a NIC that is not what was read:
//! these are what no race gets past. What is read before gives the reason, and finds what is done already.

use std::collections::BTreeMap;

use serde_json::Value;

use super::claim::{attached_to, check_owned, in_use, not_found, used_by};
use super::client::{Client, PUT_INTERFACE};
use super::interface::{Interface, IpConfiguration};
use super::resource_id::{ResourceId, Type, configuration_name};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Associate, Binding, Nic, NicId, PublicAddress};

const NAME: &str = PUT_INTERFACE.name;

/// Addresses as they are now.
type Addresses = BTreeMap<ResourceId, Value>;

/// What is to be done with an address that isn't attached where it is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Attach,
    /// It is still attached to the NIC that it is to be moved from.
    Move,
}

/// The interfaces of an attachment, as they are now.
struct Interfaces<'a> {
    /// The interface that addresses are moved from. Without content: it doesn't exist any more.
    from: Option<(&'a ResourceId, Option<Interface>)>,
    to: (&'a ResourceId, Interface),
}

/// Attaches addresses to a NIC; those that are still attached to `from` are detached there first.
pub(super) async fn attach(
    client: &Client,
    from: Option<&NicId>,
    nic: &Nic,
    bindings: &[Binding],
) -> Result<(), CloudError> {
    if bindings.is_empty() {
        return Ok(());
    }
    let to = ResourceId::of_nic(NAME, &nic.id)?;
    let from = from.map(|from| ResourceId::of_nic(NAME, from)).transpose()?.filter(|from| *from != to);
    match attempt(client, from.as_ref(), &to, bindings).await {
        // Of several addresses one was attached elsewhere meanwhile: what is read now says which, and the others can be attached.
        Err(error) if error.code == "PublicIPAddressInUse" => attempt(client, from.as_ref(), &to, bindings).await,
        result => result,
    }
}

async fn attempt(
    client: &Client,
    from: Option<&ResourceId>,
    to: &ResourceId,
    bindings: &[Binding],
) -> Result<(), CloudError> {
    let source = async {
        match from {
            Some(from) => client.interface(from).await,
            None => Ok(None),
        }
    };
    let addresses = bindings.iter().map(|binding| &binding.address);
    let (addresses, source, target) = tokio::join!(read(client, addresses), source, client.interface(to));
    let (addresses, source) = (addresses?, source?);
    let target = target?.ok_or_else(|| not_found(NAME, to))?;
    let interfaces = Interfaces { from: from.map(|from| (from, source)), to: (to, target) };
    let (mut leaving, mut coming, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
    for binding in bindings {
        let id = ResourceId::of_address(NAME, &binding.address.id)?;
        match step(client, &id, binding, addresses.get(&id), &interfaces) {
            Ok(None) => {}
            Ok(Some(step)) => {
                coming.push((id.clone(), binding));
                leaving.extend((step == Step::Move).then_some(id));
            }
            // One that can't be attached doesn't keep the others from it.
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    let Interfaces { from, to: (to, target) } = interfaces;
    if let Some((from, source)) = from.filter(|_| !leaving.is_empty()) {
        remove(client, from, source, &leaving).await?;
    }
    let done = client.change(to, Some(target), |interface: &mut Interface| {
        let mut is_changed = false;
        for (id, binding) in &coming {
            let Some(index) = vacant(client, id, binding, interface)? else { continue };
            // As the API writes it, in whatever case.
            let reference = addresses.get(id).and_then(|read| read["id"].as_str().map(str::to_owned));
            interface.set_public(index, Some(&reference.unwrap_or_else(|| id.to_string())));
            is_changed = true;
        }
        Ok(is_changed)
    });
    done.await?.ok_or_else(|| not_found(NAME, to))?;
    outcome
}

/// What is to be done with an address; `None`: it is attached where it is to be.
fn step(
    client: &Client,
    id: &ResourceId,
    binding: &Binding,
    read: Option<&Value>,
    interfaces: &Interfaces<'_>,
) -> Result<Option<Step>, CloudError> {
    let read = read.ok_or_else(|| not_found(NAME, id))?;
    check_owned(client, NAME, id, read)?;
    let (to, target) = &interfaces.to;
    if vacant(client, id, binding, target)?.is_none() {
        return Ok(None);
    }
    if target.with_public(id).is_some() {
        return Err(in_use(NAME, id, &format!("it is attached to another IP configuration of {}", to.name)));
    }
    let source = interfaces.from.as_ref().and_then(|(_, source)| source.as_ref());
    if let Some(found) = source.and_then(|source| source.with_public(id)) {
        let is_ours = own(client, id, source).is_some_and(|own| own.index == found.index);
        return if is_ours { Ok(Some(Step::Move)) } else { Err(used_by(NAME, id, read)) };
    }
    // The read of the address can be older than those of the two NICs, where it isn't.
    let is_read = |nic: &ResourceId| nic == *to || interfaces.from.as_ref().is_some_and(|(from, _)| nic == *from);
    match attached_to(read) {
        Some(user) if !ResourceId::parse_configuration(user).is_some_and(|(nic, _)| is_read(&nic)) => {
            Err(used_by(NAME, id, read))
        }
        _ => Ok(Some(Step::Attach)),
    }
}

/// Index of the IP configuration that an address is to be attached to; `None`: it is attached to it.
fn vacant(
    client: &Client,
    id: &ResourceId,
    binding: &Binding,
    interface: &Interface,
) -> Result<Option<usize>, CloudError> {
    let own = own(client, id, Some(interface)).filter(|own| own.private() == Some(binding.private));
    let own = own.ok_or_else(|| {
        let text = format!("the NIC doesn't have {} for {}", binding.private, id.name);
        CloudError::new(ErrorKind::NotFound, NAME, "NoPrivateAddress", &text)
    })?;
    match own.public_id() {
        Some(found) if id.is(found) => Ok(None),
        Some(found) => Err(in_use(NAME, id, &format!("{} has another public address, {found}", binding.private))),
        None => Ok(Some(own.index)),
    }
}

/// The IP configuration for an address.
fn own<'a>(client: &Client, id: &ResourceId, interface: Option<&'a Interface>) -> Option<IpConfiguration<'a>> {
    match client.associate {
        Associate::Nic => interface?.named(&configuration_name(id)).filter(|it| !it.is_primary()),
        Associate::Instance => interface?.primary(),
    }
}

/// Reads addresses: one alone, several in the list.
async fn read<'a>(
    client: &Client,
    addresses: impl Iterator<Item = &'a PublicAddress>,
) -> Result<Addresses, CloudError> {
    let ids = addresses.map(|address| ResourceId::of_address(NAME, &address.id)).collect::<Result<Vec<_>, _>>()?;
    if let [id] = &ids[..] {
        return Ok(client.address(id).await?.map(|read| (id.clone(), read)).into_iter().collect());
    }
    let all = client.addresses().await?;
    let id_of = |read: &Value| ResourceId::parse(read["id"].as_str()?, Type::PublicAddress);
    Ok(all.into_iter().filter_map(|read| Some((id_of(&read)?, read))).filter(|(id, _)| ids.contains(id)).collect())
}

/// Removes addresses from their IP configurations at an interface. The configurations, and so the private addresses, stay.
async fn remove(
    client: &Client,
    from: &ResourceId,
    read: Option<Interface>,
    addresses: &[ResourceId],
) -> Result<(), CloudError> {
    let changed = client.change(from, read, |interface: &mut Interface| {
        let mut is_changed = false;
        for id in addresses {
            let own = own(client, id, Some(interface));
            let index = own.filter(|own| own.public_id().is_some_and(|found| id.is(found))).map(|own| own.index);
            if let Some(index) = index {
                interface.set_public(index, None);
                is_changed = true;
            }
        }
        Ok(is_changed)
    });
    changed.await.map(drop)
}

/// Detaches addresses from a NIC, those of them that are there.
pub(super) async fn detach(client: &Client, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
    if addresses.is_empty() {
        return Ok(());
    }
    let from = ResourceId::of_nic(NAME, from)?;
    let (current, source) = tokio::join!(read(client, addresses.iter()), client.interface(&from));
    let (current, Some(source)) = (current?, source?) else { return Ok(()) };
    let (mut leaving, mut outcome) = (Vec::new(), Ok(()));
    for address in addresses {
        let id = ResourceId::of_address(NAME, &address.id)?;
        let (Some(read), Some(found)) = (current.get(&id), source.with_public(&id)) else { continue };
        let is_ours = own(client, &id, Some(&source)).is_some_and(|own| own.index == found.index);
        let checked = if is_ours { check_owned(client, NAME, &id, read) } else { Err(used_by(NAME, &id, read)) };
        match checked {
            Ok(()) => leaving.push(id),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    remove(client, &from, Some(source), &leaving).await?;
    outcome
}
