-- funnel: how many training rows each rule met
with final as (
    select step, sum(rows) as rows
    from funnel
    where family = 'all'
    group by step
    order by rows desc, step
)

select * from final
