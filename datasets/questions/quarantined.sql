-- quarantined: how many rows of each source cannot be used, and why
with final as (
    select source, reason, count(*) as rows, min(row_number) as first_row
    from quarantine
    group by source, reason
    order by source, rows desc
)

select * from final
