//! Fields that bodies can have, by the API's description; another one is an error.

use serde_json::Value;

use super::error::Error;

const RESOURCE: &[&str] = &["id", "name", "type", "location", "tags", "etag", "extendedLocation", "properties"];
const INTERFACE: &[&str] = &[
    "auxiliaryMode",
    "auxiliarySku",
    "defaultOutboundConnectivityEnabled",
    "disableTcpStateTracking",
    "dnsSettings",
    "dscpConfiguration",
    "enableAcceleratedNetworking",
    "enableIPForwarding",
    "hostedWorkloads",
    "ipConfigurations",
    "macAddress",
    "migrationPhase",
    "networkSecurityGroup",
    "nicType",
    "primary",
    "privateEndpoint",
    "privateLinkService",
    "provisioningState",
    "resourceGuid",
    "tapConfigurations",
    "virtualMachine",
    "vnetEncryptionSupported",
    "workloadType",
];
const CONFIGURATION: &[&str] = &["id", "name", "type", "etag", "properties"];
const CONFIGURATION_PROPERTIES: &[&str] = &[
    "applicationGatewayBackendAddressPools",
    "applicationSecurityGroups",
    "gatewayLoadBalancer",
    "loadBalancerBackendAddressPools",
    "loadBalancerInboundNatRules",
    "primary",
    "privateIPAddress",
    "privateIPAddressPrefixLength",
    "privateIPAddressVersion",
    "privateIPAllocationMethod",
    "privateLinkConnectionProperties",
    "provisioningState",
    "publicIPAddress",
    "subnet",
    "virtualNetworkTaps",
];
const ADDRESS: &[&str] = &[
    "ddosSettings",
    "deleteOption",
    "dnsSettings",
    "idleTimeoutInMinutes",
    "ipAddress",
    "ipConfiguration",
    "ipTags",
    "linkedPublicIPAddress",
    "migrationPhase",
    "natGateway",
    "provisioningState",
    "publicIPAddressVersion",
    "publicIPAllocationMethod",
    "publicIPPrefix",
    "resourceGuid",
    "servicePublicIPAddress",
];

/// Checks the fields of an object.
fn fields(value: &Value, what: &str, known: &[&[&str]]) -> Result<(), Error> {
    let error = |text: &str| Error::bad("InvalidRequestContent", text);
    let object = value.as_object().ok_or_else(|| error(&format!("{what} is not an object.")))?;
    let unknown = object.keys().find(|key| !known.iter().any(|fields| fields.contains(&key.as_str())));
    unknown.map_or(Ok(()), |key| {
        Err(error(&format!("Could not find member '{key}' on object of type '{what}'. Path '{key}'.")))
    })
}

pub(super) fn interface(body: &Value) -> Result<(), Error> {
    fields(body, "NetworkInterface", &[RESOURCE])?;
    fields(&body["properties"], "NetworkInterfaceProperties", &[INTERFACE])?;
    for configuration in body["properties"]["ipConfigurations"].as_array().into_iter().flatten() {
        fields(configuration, "NetworkInterfaceIpConfiguration", &[CONFIGURATION])?;
        fields(&configuration["properties"], "NetworkInterfaceIpConfigurationProperties", &[CONFIGURATION_PROPERTIES])?;
    }
    Ok(())
}

pub(super) fn address(body: &Value) -> Result<(), Error> {
    fields(body, "PublicIpAddress", &[RESOURCE, &["sku", "zones"]])?;
    fields(&body["properties"], "PublicIpAddressProperties", &[ADDRESS])
}

/// Names of tags and their values.
/// <https://learn.microsoft.com/azure/azure-resource-manager/management/tag-resources#limitations>
pub(super) fn tags(body: &Value) -> Result<(), Error> {
    let tags = body["tags"].as_object();
    let error = |code: &str, text: &str| Err(Error::bad(code, text));
    if tags.is_some_and(|tags| tags.len() > 50) {
        return error("TooManyTags", "A resource has 50 tags at most.");
    }
    for (name, value) in tags.into_iter().flatten() {
        if name.is_empty() || name.len() > 512 || name.contains(['<', '>', '%', '&', '\\', '?', '/']) {
            return error("InvalidTagNameCharacters", &format!("The tag name '{name}' has reserved characters."));
        }
        match value.as_str() {
            Some(value) if value.chars().count() <= 256 => {}
            Some(_) => return error("TagValueTooLong", "A tag value has 256 characters at most."),
            None => return error("InvalidRequestContent", "A tag value is a string."),
        }
    }
    Ok(())
}

/// Whether a text is a name of a resource of Microsoft.Network.
pub(super) fn is_name(name: &str) -> bool {
    let is_allowed = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
    let (first, last) = (name.chars().next(), name.chars().last());
    name.len() <= 80
        && name.chars().all(is_allowed)
        && first.is_some_and(|it| it.is_ascii_alphanumeric())
        && last.is_some_and(|it| it.is_ascii_alphanumeric() || it == '_')
}
